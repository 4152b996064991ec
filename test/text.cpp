// text.cpp - common/text.h: how text, numbers and sizes are shown.
#include "../common/text.h"

#include <doctest/doctest.h>

#include <utility>
#include <vector>

using namespace coat;

TEST_CASE(
    "printable: characters stay; what controls a terminal becomes ? and a byte that is no UTF-8 its number") {
    for (const auto& [text, shown] : std::vector<std::pair<std::string, std::string>>{
             {"plain ~", "plain ~"},
             {"d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x98\x80",
              "d\xC3\xA9j\xC3\xA0 \xE2\x82\xAC \xF0\x9F\x98\x80"},
             {"a\x1B[31m\n\x7F", "a?[31m??"},
             {"\xC2\x9B"
              "31m",
              "?31m"},                                      // U+009B begins a command as ESC [ does
             {"\xE9t\xE9", "\\xE9t\\xE9"},                  // Latin-1
             {"\xE2\x82", "\\xE2\\x82"},                    // the end is missing
             {"\x80\xBF", "\\x80\\xBF"},                    // the beginning is missing
             {"\xC0\x80\xC1\xBF", "\\xC0\\x80\\xC1\\xBF"},  // ASCII in two bytes
             {"\xE0\x9F\xBF\xF0\x8F\xBF\xBF", "\\xE0\\x9F\\xBF\\xF0\\x8F\\xBF\\xBF"},  // in three and four
             {"\xED\xA0\x80", "\\xED\\xA0\\x80"},                                      // half of a pair
             {"\xF4\x90\x80\x80\xF5", "\\xF4\\x90\\x80\\x80\\xF5"}})                   // above U+10FFFF
        CHECK(printable(text) == shown);
    CHECK(printable("a\n\tb\r", "\n\t") == "a\n\tb?");
}

TEST_CASE("text: numbers in groups of three digits; GB of a billion bytes; one rank and two ranks") {
    CHECK(with_commas(0) + " " + with_commas(999) + " " + with_commas(1000) + " " + with_commas(6738415616) ==
          "0 999 1,000 6,738,415,616");
    CHECK(with_commas(-100) + " " + with_commas(-1234567) == "-100 -1,234,567");
    CHECK(gigabytes(78'834'000'000) + " " + gigabytes(100'000'000) + " " + gigabytes(21'400'000) ==
          "78.8 0.1 0.021");
    CHECK(with_noun(1, "rank") + ", " + with_noun(2, "rank") + ", " + with_noun(4096, "batch") ==
          "1 rank, 2 ranks, 4,096 batches");
}
