"""What results look like: printed tables and figures."""
