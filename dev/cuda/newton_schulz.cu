/* newton_schulz: out = an orthogonal matrix near inp, for each of many matrices: the core of the optimizer Muon

   out (num,n,k) floatX out | inp (num,n,k) floatX in, each matrix of a Frobenius norm of at most 1
   The flags -B, -C and -T are num, n and k.
   For inp = U S V^T, out = U S' V^T, where S' is between about 0.7 and 1.2 unless S is tiny. Five times, with x = inp at
   first:
       gram = x x^T,  poly = b gram + c gram gram,  x = a x + poly x           a, b, c = 3.4445, -4.7750, 2.0315
   gram, poly and x are rounded to floatX each time; sums are in fp32.
   Bound: matrix rate, 5 num (2 n (n+1) k / 2 + 2 n (n+1) n / 2 + 2 n n k) FLOPs: gram and poly are symmetric.
   Constraint: n % 8 == 0 and k % 8 == 0 from kernel 3 on; num <= 65535.
   Error: small singular values grow by a in each step, and so do rounding errors in their directions. Of the results' root
   mean square, 1 / sqrt(max(n,k)), it is 1% in bf16, and 10% in the worst of 2 million; 20 ulps are allowed, in fp32 300.
   Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

   The ladder. A layer has matrices of (C,C) and, if tall ones are transposed, of (C,4C). One of them is too small for a
   whole GPU: at C = 768 it has 36 tiles of 128x128, for 132 SMs. So all kernels take many matrices in one launch.
     1  three products as loops                   the operands come from the caches
     2  64x64 tiles in shared memory              a value is loaded once for 64 results; for fp32 and old GPUs
     3  tensor cores, a ring of stages            as kernel 13 of matmul_forward
     4  half of gram and of poly                  tiles on and above the diagonal, stored twice
     5  wgmma, TMA, ping-pong                     as gemm.cuh, with matrices as the third dimension of tensor maps
   At (768,768), kernels 4 and 5 compute 21 of 36 tiles of gram and poly, in all 72% of the products of kernel 3.
   In kernels 1 to 5 the term b gram or a x is added in the epilogue; in kernel 0 it is copied to the result first.

   Kernels (this list is written by versions.sh):
     0  cuBLAS, batched
     1  one thread per result
     2  64x64 tiles in shared memory
     3  tensor cores, a ring of stages
     4  as 3, half of the symmetric products
     5  as 4, by wgmma with operands by TMA (promoted)

   nvcc -O3 --use_fast_math newton_schulz.cu -lcublas -lcublasLt -o newton_schulz      (or: make newton_schulz)
   ./newton_schulz 5              check kernel 5 against the CPU
   ./newton_schulz -B 24 -T 3072  the matrices of the MLP                                         */
#include "../../llmc/cublas_common.cuh"
#include "../../llmc/ptx.cuh"
#include "bench.h"
#include "cublas_batched.cuh"

#include "newton_schulz.cuh" // kernels 2, 4 and 5

// ---- kernel 0: cuBLAS, batched; the added term is copied to the result before the product ----

// cuBLAS is column-major, so it computes the transpose of the result.
void newton_schulz0(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, cudaStream_t stream) {
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        long long MN = (long long)p.M * p.N, MK = (long long)p.M * p.K, NK = (long long)p.N * p.K;
        const cudaDataType_t type = cublaslt_floatX;
        if (p.add) {
            cudaCheck(cudaMemcpyAsync(p.out, p.add, num * MN * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
        }
        cublas_batched(p.right_by_k ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, p.N, p.M, p.K, &p.scale, p.right, type,
                       p.right_by_k ? p.N : p.K, NK, p.left, type, p.K, MK, &p.add_scale, p.out, type, p.N, MN, num,
                       stream);
    });
}

// ---- kernel 1: one thread per result ----------------------------------------------------------

__global__ void newton_schulz_kernel1(NewtonSchulzProduct batch) {
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.M * p.N) { return; }
    size_t row = i / p.N, column = i % p.N;
    float sum = 0.0f;
    for (size_t k = 0; k < (size_t)p.K; k++) {
        sum += (float)p.left[row * p.K + k] * (float)p.right[p.right_by_k ? k * p.N + column : column * p.K + k];
    }
    p.out[i] = (floatX)(p.scale * sum + (p.add ? p.add_scale * (float)p.add[i] : 0.0f));
}

void newton_schulz1(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, cudaStream_t stream,
                    int block_size) {
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        dim3 grid((unsigned)ceil_div((size_t)p.M * p.N, (size_t)block_size), num);
        newton_schulz_kernel1<<<grid, block_size, 0, stream>>>(p);
        cudaCheck(cudaGetLastError());
    });
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// ---- kernel 3: tensor cores, a ring of stages filled by cp.async -----------------------------------

template <bool right_by_k, int ring> __global__ void __launch_bounds__(256, 2)
    newton_schulz_kernel3(NewtonSchulzProduct batch) {
    extern __shared__ __align__(128) unsigned char newton_schulz_dynamic[];
    auto& shared = *reinterpret_cast<NewtonSchulzSMem<ring>*>(newton_schulz_dynamic);
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    int num_columns = ceil_div(p.N, 128), row0 = blockIdx.x / num_columns * 128,
        column0 = blockIdx.x % num_columns * 128;
    float sum[4][16] = {};
    newton_schulz_multiply<right_by_k>(sum, shared, p, row0, column0);
    newton_schulz_store(sum, NULL, p, row0, column0);
}

void newton_schulz3(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, cudaStream_t stream) {
    require(n % 8 == 0 && k % 8 == 0);
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        auto kernel = p.right_by_k ? newton_schulz_kernel3<true, 4> : newton_schulz_kernel3<false, 4>;
        const int bytes = sizeof(NewtonSchulzSMem<4>);
        require(compiled_arch(kernel) >= 80);
        cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<dim3(ceil_div(p.M, 128) * ceil_div(p.N, 128), num), 256, bytes, stream>>>(p);
        cudaCheck(cudaGetLastError());
    });
}

#endif

// ---- main ------------------------------------------------------------------------------------------

static void declare(Bench& b) {
    b.varies("BTC");
    int num = b.B, n = b.C, k = b.T;
    size_t size = (size_t)num * n * k;
    cudaStream_t stream = b.stream;
    if (!b.dry) {
        cublaslt_open(); // needed to measure the matrix rate
        cublas_handle();
    }
    // a few large singular values beside many small ones, as gradients have them: rows that are nearly multiples of
    // each other
    bool low_rank = b.cases({"normal", "nearly of rank 1"}) == 1;
    Buffer<floatX> inp = b.input_from<floatX>("inp", size, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, size, seed, 0.9f / sqrtf((float)n * k), 0.0f);
        for (size_t i = 0; low_rank && i < size; i++) {
            size_t row = i / k, column = i % k;
            float sign = (hash_bits((uint32_t)row, seed) ^ hash_bits((uint32_t)column, seed + 1)) & 1 ? 1.0f : -1.0f;
            x[i] = 0.1f * x[i] + 0.9f * sign / sqrtf((float)n * k);
        }
    });
    float rms = 1.0f / sqrtf((float)std::max(n, k));
    Tolerance tolerance = {(sizeof(floatX) == 4 ? 300.0f : 20.0f) * ulp_of<floatX>() * rms, 0.0f};
    Buffer<floatX> out = b.output<floatX>("out", size, tolerance);
    Buffer<floatX> scratch = b.scratch<floatX>("scratch", newton_schulz_scratch(num, n, k));
    double N = n, K = k, flops = 5.0 * num * (N * (N + 1) * (N + K) + 2 * N * N * K);
    std::vector<size_t> matrices = b.sample(num, 10.0 * N * N * (N + 2 * K));
    b.reference([=] {
        std::vector<float> x = rows_of(inp.host, matrices, (size_t)n * k), y(x.size());
        newton_schulz_cpu(y.data(), x.data(), (int)matrices.size(), n, k);
        put_rows(out.host, y, matrices, (size_t)n * k);
    });
    b.cost(2.0 * (double)size * sizeof(floatX), flops);
    b.matrix_rate(cublaslt_matrix_rate);
    b.kernel(0, "cuBLAS, batched", [=](int) { newton_schulz0(out, scratch, inp, num, n, k, stream); }, {0});
    b.kernel(1, "one thread per result", [=](int bs) { newton_schulz1(out, scratch, inp, num, n, k, stream, bs); });
    b.kernel(2, "64x64 tiles in shared memory", [=](int) { newton_schulz2(out, scratch, inp, num, n, k, stream); },
             {0});
#if !defined(ENABLE_FP32)
    b.kernel(
        3, "tensor cores, a ring of stages", [=](int) { newton_schulz3(out, scratch, inp, num, n, k, stream); }, {0},
        80);
    b.kernel(
        4, "as 3, half of the symmetric products",
        [=](int stages) {
            (stages == 3   ? newton_schulz4<3>
             : stages == 5 ? newton_schulz4<5>
                           : newton_schulz4<4>)(out, scratch, inp, num, n, k, stream);
        },
        {3, 4, 5}, 80);
    b.config("stages");
    b.kernel(
        5, "as 4, by wgmma with operands by TMA", [=](int) { newton_schulz(out, scratch, inp, num, n, k, stream); },
        {0}, -90);
    b.promoted(5);
#else
    b.promoted(2);
#endif
}

int main(int argc, char** argv) {
    return bench_main(
        argc, argv, "newton_schulz", declare, {48, 768, 768, 12, 50257},
        {{1, 8, 8}, {3, 24, 16}, {1, 136, 136}, {1, 264, 136}, {2, 16, 144}, {1, 24, 264}, {3, 136, 200}});
}
