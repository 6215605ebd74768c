"""Object detection in the layout of COCO."""
