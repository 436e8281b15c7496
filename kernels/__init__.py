"""The maths behind one door, `octavo.kernels.ops`."""
