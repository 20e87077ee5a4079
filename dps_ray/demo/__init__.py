"""A fleet that starts, serves a bursty trace and ends by itself."""
