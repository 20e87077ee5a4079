"""Home of the fleet's Ray Serve autoscaling policies; fleets are of fixed size so far."""
