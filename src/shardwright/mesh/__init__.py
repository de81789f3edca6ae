"""Who the ranks are, how they meet, and the mesh that they make."""
