#pragma once

// Elementary functions whose bits are the same with every math library, for values that training depends on: IEEE adds,
// multiplies, divisions and fused multiply-adds in one order. Within 0.8 ulp.
namespace invar::elementary {

// Of angles of at most 2^30.
double sin(double angle);
double cos(double angle);

// e^x: 0 below the range, inf above it, NaN of NaN.
double exp(double x);

// base^exponent of a finite base ≥ 0, where exponent · ln(base) is finite: 0 below the range, inf above it.
double pow(double base, double exponent);

}  // namespace invar::elementary
