"""What all scripts train: the bundled digits, 54 epochs of 23 steps, a checkpoint every 6 epochs."""

import os

from clusterddp.digits.digits import Net as Net
from clusterddp.digits.digits import load_digits

EPOCHS, PER_EPOCH, SAVE_EPOCHS = int(os.environ.get("PEERS_EPOCHS", 54)), 23, 6
STEPS, SAVE_STEPS = EPOCHS * PER_EPOCH, SAVE_EPOCHS * PER_EPOCH
BATCH, SEED, LR = 16, 0, 2e-3
#: How long a rank waits for another in a collective: what every script sets, in the way that its library documents.
TIMEOUT_S = 60

train_set = load_digits()[0]
