// dev.cpp - the tests of dev/, compiled together as in data.cpp. Those of the exercises come first: some of
// their names, such as Matrix, are other types in coat::reference.
#include "dev/exercises.cpp"

#include "dev/arithmetic.cpp"
#include "dev/commands.cpp"
#include "dev/pages.cpp"
#include "dev/plot.cpp"
#include "dev/results.cpp"
