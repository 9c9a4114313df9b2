// LD_PRELOAD: exact live bytes of the CPU allocator of PyTorch (c10), on all threads: it alone
// asks posix_memalign for blocks that are aligned to 64 bytes. Needs glibc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#define N (1<<20)
static _Atomic(uintptr_t) keys[N]; static size_t vals[N];
static _Atomic long live, peak; static atomic_flag lock = ATOMIC_FLAG_INIT;
static int (*real_pm)(void**, size_t, size_t); static void (*real_free)(void*);
extern void __libc_free(void*);
static inline size_t h(uintptr_t p){ return ((p>>6)*11400714819323198485ull)>>44; }
static long tracked;
int posix_memalign(void** out, size_t al, size_t n){
  if(!real_pm) real_pm = dlsym(RTLD_NEXT,"posix_memalign");
  int r = real_pm(out, al, n);
  if(r==0 && al==64 && n){
    while(atomic_flag_test_and_set_explicit(&lock,memory_order_acquire));
    size_t i=h((uintptr_t)*out)&(N-1); while(keys[i]>1) i=(i+1)&(N-1);
    keys[i]=(uintptr_t)*out; vals[i]=n; tracked++;
    long l = (live += n); if(l>peak) peak=l;
    atomic_flag_clear_explicit(&lock,memory_order_release);
  }
  return r;
}
void free(void* p){
  if(p && (((uintptr_t)p)&63)==0){
    while(atomic_flag_test_and_set_explicit(&lock,memory_order_acquire));
    size_t i=h((uintptr_t)p)&(N-1);
    while(keys[i]){ if(keys[i]==(uintptr_t)p){ keys[i]=1; live-=vals[i]; tracked--; break;} i=(i+1)&(N-1);}
    atomic_flag_clear_explicit(&lock,memory_order_release);
  }
  __libc_free(p);
}
long shim_live(void){return live;} long shim_peak(void){return peak;} void shim_reset(void){peak=live;} long shim_count(void){return tracked;}
