"""Facts of a step that attention needs, and the layer that uses them."""
