"""Several servers under the same load, one after the other, in rounds."""
