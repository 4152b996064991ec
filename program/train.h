// program/train.h - the training loop (train.cpp).
#pragma once
#include "run.h"

namespace coat {

// Trains until --steps, or until a signal comes. Returns the exit code.
int train(Run& run);

}  // namespace coat
