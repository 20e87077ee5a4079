"""A real fleet that scales through a recorded burst."""
