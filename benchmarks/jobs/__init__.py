"""Programs that run on every rank; rank 0 prints records as lines `@record {json}`."""
