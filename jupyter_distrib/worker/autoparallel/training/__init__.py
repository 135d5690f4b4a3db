"""The spreading of models and their training over ranks."""
