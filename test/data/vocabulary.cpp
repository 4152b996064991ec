// vocabulary.cpp - data/vocabulary.cpp: tokens become text.
#include "../../data/vocabulary.h"

#include <doctest/doctest.h>

using namespace coat;

TEST_CASE("vocabulary: a token becomes its bytes; one that is not known its number") {
    Vocabulary v = byte_vocabulary();
    v.pieces.push_back(" the");
    v.pieces.push_back("");
    CHECK(v.decode({65, 256, 255}) == "A the\xFF");
    CHECK(v.decode({257, 258, -1}) == "<257><258><-1>");
}
