"""What the processes of raytrain's own Ray cluster find in place of the package; see ``lean_imports.py``."""

raise ImportError("left out, because it takes long to import; see raytrain/launch/ray/own_cluster.py")
