/* gradient_check: the backward pass of a layernorm, compared with finite differences. 08_backward.md explains it.

   cc -std=c11 -ffp-contract=off gradient_check.c -o gradient_check -lm && ./gradient_check
   -DREAL=float computes in float instead of double; -DBUG leaves a term of the gradient out. Exit 1 if the two disagree.
   Source: the derivation in 08_backward.md.                                                                            */
#include <math.h>
#include <stdio.h>

#ifndef REAL
#define REAL double
#endif
typedef REAL real;
enum { N = 3, C = 8 }; // rows, columns

static real inp[N * C], weight[C], bias[C]; // inputs of the forward pass
static real dout[N * C];                    // the gradient that arrives
static real dinp[N * C], dweight[C], dbias[C];

// The mean of a row, and the reciprocal of its standard deviation.
static void statistics(const real* x, real* mean, real* rstd) {
    real sum = 0, squares = 0;
    for (int c = 0; c < C; c++) { sum += x[c]; }
    *mean = sum / C;
    for (int c = 0; c < C; c++) { squares += (x[c] - *mean) * (x[c] - *mean); }
    *rstd = 1 / (real)sqrt(squares / C + (real)1e-5);
}

// The forward pass, and after it a loss whose gradient with respect to out is dout: the sum of out * dout.
static real loss(void) {
    real sum = 0, mean, rstd;
    for (int row = 0; row < N; row++) {
        statistics(inp + row * C, &mean, &rstd);
        for (int c = 0; c < C; c++) {
            real out = (inp[row * C + c] - mean) * rstd * weight[c] + bias[c];
            sum += out * dout[row * C + c];
        }
    }
    return sum;
}

// The backward pass: the formulas of 08_backward.md.
static void backward(void) {
    real mean, rstd;
    for (int row = 0; row < N; row++) {
        const real *x = inp + row * C, *dy = dout + row * C;
        real sum = 0, dot = 0;
        statistics(x, &mean, &rstd);
        for (int c = 0; c < C; c++) {
            real norm = (x[c] - mean) * rstd, dnorm = dy[c] * weight[c];
            sum += dnorm;
            dot += dnorm * norm;
            dweight[c] += dy[c] * norm;
            dbias[c] += dy[c];
        }
#ifdef BUG
        sum = 0; // as if the mean did not depend on inp
#endif
        for (int c = 0; c < C; c++) {
            real norm = (x[c] - mean) * rstd, dnorm = dy[c] * weight[c];
            dinp[row * C + c] = rstd * (dnorm - sum / C - norm * dot / C);
        }
    }
}

// How the loss changes with *x, measured over a distance of h to both sides.
static real difference(real* x, real h) {
    real before = *x;
    *x = before + h;
    real above = loss();
    *x = before - h;
    real below = loss();
    *x = before;
    return (above - below) / (2 * h);
}

typedef struct {
    const char* name;
    real *values, *gradient;
    int size;
} Tensor;
static const Tensor tensors[3] = {
    {"inp", inp, dinp, sizeof(inp) / sizeof(real)},
    {"weight", weight, dweight, C},
    {"bias", bias, dbias, C},
};

// The largest distance between the two gradients, over all elements of all tensors.
static real worst(real h) {
    real most = 0;
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < tensors[t].size; i++) {
            most = (real)fmax(most, fabs(difference(tensors[t].values + i, h) - tensors[t].gradient[i]));
        }
    }
    return most;
}

// The next of a fixed sequence of numbers between -1 and 1.
static real next_number(void) {
    static unsigned state = 1337;
    state = state * 1664525u + 1013904223u;
    return (real)((int)(state >> 16) - 32768) / 32768;
}

int main(void) {
    for (int i = 0; i < N * C; i++) { inp[i] = next_number(), dout[i] = next_number(); }
    for (int c = 0; c < C; c++) { weight[c] = 1 + next_number() / 2, bias[c] = next_number(); }
    backward();

    real h = sizeof(real) == 8 ? (real)1e-4 : (real)1e-2, least = 1;
    printf("                 backward  difference, h = %g\n", (double)h);
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < 3; i++) {
            printf("d%-6s element %d %9.5f  %9.5f\n", tensors[t].name, i, (double)tensors[t].gradient[i],
                   (double)difference(tensors[t].values + i, h));
        }
    }
    printf("\nh        largest error of %d elements\n", N * C + 2 * C);
    h = 1;
    for (int i = 0; i < 10; i++, h /= 10) {
        printf("%.0e    %.0e\n", (double)h, (double)worst(h));
        least = (real)fmin(least, worst(h));
    }
    printf("%s\n", least < (real)1e-3 ? "the gradients agree" : "the gradients DISAGREE");
    return least < (real)1e-3 ? 0 : 1;
}
