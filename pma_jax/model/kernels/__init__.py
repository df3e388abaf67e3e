"""Matrix products and attention with one implementation per platform."""
