"""The steps behind `make setup`. Only the standard library: they run before anything is installed."""
