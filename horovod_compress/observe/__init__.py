"""What is counted, recorded and drawn of a running job. Nothing here decides anything, and nothing waits for it."""
