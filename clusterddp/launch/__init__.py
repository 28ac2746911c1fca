"""The launch half: job submission, the supervisor, status. It never imports torch or the training half."""
