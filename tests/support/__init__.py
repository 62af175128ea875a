"""What the tests share: jobs of real processes, ranks as threads, models and inputs."""
