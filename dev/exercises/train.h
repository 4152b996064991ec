// train.h - the functions of exercises 3, 7, 8, 10 and 11 as they are written in this folder, for exercise
// 12, and the loop that trains with them and with the reference.
#pragma once
#include <cmath>
#include <iostream>
#include <map>
#include <sstream>

#include "capstone.h"

#define main JOINED(main_of_exercise_, __COUNTER__)  // each exercise has a main(), which is not called
#define JOINED(name, number) JOINED_(name, number)
#define JOINED_(name, number) name##number
#include "03-quantize-to-groups.cpp"
#include "07-adamw.cpp"
#include "08-linear.cpp"
#include "10-norm-backward.cpp"
#include "11-swiglu-backward.cpp"
#undef main

// Runs a judge without its output.
inline bool is_solved(const std::function<int()>& judge) {
    std::ostringstream out;
    std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
    const int code = judge();
    std::cout.rdbuf(before);
    return code == 0;
}

inline int train_and_compare(double (*step)(SmallModel&, int)) {
    const std::map<int, std::function<int()>> judges = {
        {3, [] { return judge::quantize_to_groups(quantize_to_groups); }},
        {7, [] { return judge::adamw(adamw); }},
        {8, [] { return judge::linear(gemm, linear); }},
        {10, [] { return judge::norm_backward(norm_backward); }},
        {11, [] { return judge::swiglu_backward(swiglu_backward); }}};
    std::string missing;
    for (const auto& [number, judge] : judges)
        if (!is_solved(judge)) missing += " " + std::to_string(number);
    if (missing.empty()) return judge::training(step);
    std::cout << "exercise 12: nothing is computed yet. It calls functions of exercises that are not solved, "
                 "so solve these first:"
              << missing << "\n";
    return 1;
}
