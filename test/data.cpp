// data.cpp - the tests of data/, compiled together: headers take most of the time of compiling a test.
#include "data/checkpoint.cpp"
#include "data/data_files.cpp"
#include "data/model_folder.cpp"
#include "data/safetensors.cpp"
#include "data/tokenize.cpp"
#include "data/tokens.cpp"
#include "data/vocabulary.cpp"
