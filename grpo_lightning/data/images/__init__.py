"""Images of a dataset: references, checks before a run, boxes, placeholders and prefetching."""
