"""Charts as SVG inside one HTML file: nothing is fetched, so a page can be kept and mailed."""
