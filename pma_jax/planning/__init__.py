"""What a run needs, found before it starts and without its hardware."""
