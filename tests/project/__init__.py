"""Tests of the project as a whole: levels of imports, public names, packaging, and the marks of tests."""
