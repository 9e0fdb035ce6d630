"""Images of a data set: where they are, whether they can be read, and their boxes."""
