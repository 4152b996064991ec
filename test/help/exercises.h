// exercises.h - what the judge of dev/exercises says of an empty body, of mistakes, and of a solution.
#pragma once
#include <bit>
#include <iostream>

#include "../../dev/exercises/judge.h"
#include "files.h"

namespace coat::test {

// A judge prints the sentence, which may be a hint. It returns 0 only if the sentence says that the solution
// passed.
inline void says(const std::string& sentence, const std::function<int()>& run) {
    std::ostringstream out;
    std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
    judge::hint_wanted = true;
    const int code = run();
    judge::hint_wanted = false;
    std::cout.rdbuf(before);
    CHECK(code == !contains(sentence, "passed, "));
    CHECK_MESSAGE(contains(out.str(), sentence), out.str());
}

}  // namespace coat::test
