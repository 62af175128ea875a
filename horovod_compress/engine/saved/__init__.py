"""What a rank saves: its state, checksums, and the folders that many savers share."""
