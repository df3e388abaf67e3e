"""Models from and for other libraries: Hugging Face directories in and out."""
