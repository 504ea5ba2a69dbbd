#include "ptx.h"

namespace conflux::ptx {

// A waiting block watches the wall clock (%globaltimer, ns) and, in case that one stands still as on some virtual GPUs,
// the cycle counter too: four cycles per nanosecond are more than any GPU does.
//
// One thread of a block counts and waits; the others wait for it at the barrier, because a block's thread slots, which
// keep other blocks off its SM, are given back only when all of it has ended.
const char kBase[] = R"ptx(
.version 6.0
.target sm_60
.address_size 64

.visible .entry conflux_smid(
    .param .u64 param_counters,
    .param .u32 param_capacity,
    .param .u64 param_hold)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %d<12>;

    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra SMID_JOIN;

    ld.param.u64 %d0, [param_counters];
    ld.param.u32 %r1, [param_capacity];
    ld.param.u64 %d1, [param_hold];
    cvta.to.global.u64 %d2, %d0;
    mov.u32 %r2, %smid;
    min.u32 %r2, %r2, %r1;
    mul.wide.u32 %d3, %r2, 4;
    add.u64 %d4, %d2, %d3;
    red.global.add.u32 [%d4], 1;

    mov.u64 %d5, %globaltimer;
    mov.u64 %d6, %clock64;
    shl.b64 %d7, %d1, 2;
SMID_WAIT:
    mov.u64 %d8, %globaltimer;
    sub.u64 %d8, %d8, %d5;
    setp.lt.u64 %p1, %d8, %d1;
    mov.u64 %d9, %clock64;
    sub.u64 %d9, %d9, %d6;
    setp.lt.and.u64 %p2, %d9, %d7, %p1;
    @%p2 bra SMID_WAIT;

SMID_JOIN:
    bar.sync 0;
    ret;
}

.visible .entry conflux_hold(
    .param .u64 param_hold)
{
    .reg .pred %p<4>;
    .reg .b64 %d<8>;

    ld.param.u64 %d0, [param_hold];
    mov.u64 %d1, %globaltimer;
    mov.u64 %d2, %clock64;
    shl.b64 %d3, %d0, 2;
HOLD_WAIT:
    mov.u64 %d4, %globaltimer;
    sub.u64 %d4, %d4, %d1;
    setp.lt.u64 %p0, %d4, %d0;
    mov.u64 %d5, %clock64;
    sub.u64 %d5, %d5, %d2;
    setp.lt.and.u64 %p1, %d5, %d3, %p0;
    @%p1 bra HOLD_WAIT;
    ret;
}

.visible .entry conflux_spin(
    .param .u64 param_sink,
    .param .u32 param_iterations)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .f32 %f<12>;
    .reg .b64 %d<4>;

    ld.param.u32 %r0, [param_iterations];
    mov.u32 %r1, %tid.x;
    cvt.rn.f32.u32 %f0, %r1;
    add.f32 %f1, %f0, 0f3F800000;
    add.f32 %f2, %f0, 0f40000000;
    add.f32 %f3, %f0, 0f40400000;
    mov.f32 %f4, 0f3F7FF972;
    mov.f32 %f5, 0f3A83126F;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 bra SPIN_END;
SPIN_LOOP:
    fma.rn.f32 %f0, %f0, %f4, %f5;
    fma.rn.f32 %f1, %f1, %f4, %f5;
    fma.rn.f32 %f2, %f2, %f4, %f5;
    fma.rn.f32 %f3, %f3, %f4, %f5;
    fma.rn.f32 %f0, %f0, %f4, %f5;
    fma.rn.f32 %f1, %f1, %f4, %f5;
    fma.rn.f32 %f2, %f2, %f4, %f5;
    fma.rn.f32 %f3, %f3, %f4, %f5;
    fma.rn.f32 %f0, %f0, %f4, %f5;
    fma.rn.f32 %f1, %f1, %f4, %f5;
    fma.rn.f32 %f2, %f2, %f4, %f5;
    fma.rn.f32 %f3, %f3, %f4, %f5;
    fma.rn.f32 %f0, %f0, %f4, %f5;
    fma.rn.f32 %f1, %f1, %f4, %f5;
    fma.rn.f32 %f2, %f2, %f4, %f5;
    fma.rn.f32 %f3, %f3, %f4, %f5;
    sub.u32 %r0, %r0, 1;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra SPIN_LOOP;
SPIN_END:
    // The sums stay finite, so nothing is stored; but the compiler cannot know, and keeps the work.
    add.f32 %f6, %f0, %f1;
    add.f32 %f7, %f2, %f3;
    add.f32 %f6, %f6, %f7;
    setp.neu.f32 %p2, %f6, 0f7F800000;
    @%p2 bra SPIN_RET;
    ld.param.u64 %d0, [param_sink];
    cvta.to.global.u64 %d1, %d0;
    st.global.f32 [%d1], %f6;
SPIN_RET:
    ret;
}

.visible .entry conflux_read(
    .param .u64 param_source,
    .param .u64 param_vectors,
    .param .u32 param_repeats,
    .param .u64 param_sink)
{
    .reg .pred %p<8>;
    .reg .b32 %r<32>;
    .reg .b64 %d<24>;

    ld.param.u64 %d0, [param_source];
    ld.param.u64 %d1, [param_vectors];
    ld.param.u32 %r0, [param_repeats];
    cvta.to.global.u64 %d2, %d0;

    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d3, %r1, %r2;
    cvt.u64.u32 %d4, %r3;
    add.u64 %d3, %d3, %d4;
    shl.b64 %d3, %d3, 4;
    add.u64 %d5, %d2, %d3;        // this thread's first vector
    mul.wide.u32 %d6, %r4, %r2;
    shl.b64 %d6, %d6, 4;          // bytes from one of its vectors to the next
    shl.b64 %d7, %d6, 1;
    add.u64 %d8, %d7, %d6;
    shl.b64 %d9, %d6, 2;
    shl.b64 %d10, %d1, 4;
    add.u64 %d10, %d2, %d10;      // end of the buffer

    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 bra READ_END;
READ_REPEAT:
    mov.u64 %d11, %d5;
READ_FOUR:
    add.u64 %d14, %d11, %d8;
    setp.ge.u64 %p1, %d14, %d10;
    @%p1 bra READ_ONE;
    add.u64 %d12, %d11, %d6;
    add.u64 %d13, %d11, %d7;
    ld.global.cs.v4.u32 {%r10, %r11, %r12, %r13}, [%d11];
    ld.global.cs.v4.u32 {%r14, %r15, %r16, %r17}, [%d12];
    ld.global.cs.v4.u32 {%r18, %r19, %r20, %r21}, [%d13];
    ld.global.cs.v4.u32 {%r22, %r23, %r24, %r25}, [%d14];
    add.u64 %d11, %d11, %d9;
    xor.b32 %r5, %r5, %r10;
    xor.b32 %r6, %r6, %r11;
    xor.b32 %r7, %r7, %r12;
    xor.b32 %r8, %r8, %r13;
    xor.b32 %r5, %r5, %r14;
    xor.b32 %r6, %r6, %r15;
    xor.b32 %r7, %r7, %r16;
    xor.b32 %r8, %r8, %r17;
    xor.b32 %r5, %r5, %r18;
    xor.b32 %r6, %r6, %r19;
    xor.b32 %r7, %r7, %r20;
    xor.b32 %r8, %r8, %r21;
    xor.b32 %r5, %r5, %r22;
    xor.b32 %r6, %r6, %r23;
    xor.b32 %r7, %r7, %r24;
    xor.b32 %r8, %r8, %r25;
    bra READ_FOUR;
READ_ONE:
    setp.ge.u64 %p2, %d11, %d10;
    @%p2 bra READ_NEXT;
    ld.global.cs.v4.u32 {%r10, %r11, %r12, %r13}, [%d11];
    add.u64 %d11, %d11, %d6;
    xor.b32 %r5, %r5, %r10;
    xor.b32 %r6, %r6, %r11;
    xor.b32 %r7, %r7, %r12;
    xor.b32 %r8, %r8, %r13;
    bra READ_ONE;
READ_NEXT:
    sub.u32 %r0, %r0, 1;
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra READ_REPEAT;
READ_END:
    // Stored only if the buffer's bits happen to add up to this number: the loads must not be optimised away.
    xor.b32 %r5, %r5, %r6;
    xor.b32 %r7, %r7, %r8;
    xor.b32 %r5, %r5, %r7;
    setp.ne.u32 %p4, %r5, 0x5ca1ab1e;
    @%p4 bra READ_RET;
    ld.param.u64 %d15, [param_sink];
    cvta.to.global.u64 %d16, %d15;
    st.global.u32 [%d16], %r5;
READ_RET:
    ret;
}
)ptx";

const char kClusters[] = R"ptx(
.version 7.8
.target sm_90
.address_size 64

.visible .entry conflux_cluster(
    .param .u64 param_out,
    .param .u64 param_hold)
{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %d<12>;

    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra CLUSTER_JOIN;

    ld.param.u64 %d0, [param_out];
    ld.param.u64 %d1, [param_hold];
    cvta.to.global.u64 %d2, %d0;
    mov.u32 %r1, %clusterid.x;
    mov.u32 %r2, %cluster_nctarank;
    mov.u32 %r3, %cluster_ctarank;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %d3, %r4, 4;
    add.u64 %d4, %d2, %d3;
    mov.u32 %r5, %smid;
    st.global.u32 [%d4], %r5;

    mov.u64 %d5, %globaltimer;
    mov.u64 %d6, %clock64;
    shl.b64 %d7, %d1, 2;
CLUSTER_WAIT:
    mov.u64 %d8, %globaltimer;
    sub.u64 %d8, %d8, %d5;
    setp.lt.u64 %p1, %d8, %d1;
    mov.u64 %d9, %clock64;
    sub.u64 %d9, %d9, %d6;
    setp.lt.and.u64 %p2, %d9, %d7, %p1;
    @%p2 bra CLUSTER_WAIT;

CLUSTER_JOIN:
    bar.sync 0;
    ret;
}
)ptx";

}  // namespace conflux::ptx
