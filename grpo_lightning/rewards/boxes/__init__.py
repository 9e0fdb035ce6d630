"""Bounding boxes in answers: parsing, coordinate frames, IoU and detection rewards."""
