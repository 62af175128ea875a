"""The ways of choosing buckets, one file each; :mod:`.registry` knows them by the names that ``schedule=`` takes."""
