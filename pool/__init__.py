"""Who owns which sandbox, and when: the warm pool, its sessions and its supervisor. Users import ``emberpool``."""
