"""Architectures: one file each where they differ in more than their options."""
