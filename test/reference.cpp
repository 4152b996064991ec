// reference.cpp - the tests of the reference, compiled together as in data.cpp.
#include "reference/1_2_codes.cpp"
#include "reference/3_optimizer.cpp"
#include "reference/4_operators.cpp"
#include "reference/5_gradients.cpp"
