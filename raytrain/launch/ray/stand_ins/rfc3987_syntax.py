"""Stand-in for a package that Ray imports and never uses; see ``own_cluster.py``."""

raise ImportError("left out, because it takes long to import; see raytrain/launch/ray/own_cluster.py")
