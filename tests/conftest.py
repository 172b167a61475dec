"""Fixtures that several rooms use."""
