"""The container engine: the protocol that the rest is written on, and the docker and podman command lines behind it."""
