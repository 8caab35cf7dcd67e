"""The Ray actors of the three fleets and the recorder: plain classes, made remote in `cluster`."""
