"""Object detection datasets in the layout of COCO."""
