"""Ray Serve autoscaling for elastic replicas."""
