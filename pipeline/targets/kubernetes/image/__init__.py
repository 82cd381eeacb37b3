"""Images: what is in them, who builds them, where they are pushed."""
