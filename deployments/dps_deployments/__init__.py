"""Ray Serve deployments of the fleet: replica server, controller, router, app builders."""
