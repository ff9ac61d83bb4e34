/* furlong/torch.h - the arena as PyTorch's pluggable allocator
 *
 *     a = torch.cuda.memory.CUDAPluggableAllocator("libfurlong.so.1",
 * "furlong_torch_alloc_weights", "furlong_torch_free") with
 * torch.cuda.use_mem_pool(torch.cuda.MemPool(a.allocator())): model = ...
 *
 * One function a tag, so that a pool's memory has its tag whatever thread allocates it. Works with
 * and without a seat in a run; what lies here is offloaded with its tag, exported as it is, and
 * never in another arena than furlong_arena_alloc()'s. Tensors keep their addresses; none may be in
 * use while their tag is out. */
#pragma once
#include <sys/types.h>

#include <furlong/furlong.h>

/* device: PyTorch's index. NULL: no memory (PyTorch raises its own error); furlong_torch_error()
 * says why. */
void *furlong_torch_alloc(ssize_t bytes, int device, void *stream); /* FURLONG_TAG_DEFAULT */
void *furlong_torch_alloc_weights(ssize_t bytes, int device, void *stream);
void *furlong_torch_alloc_kv_cache(ssize_t bytes, int device, void *stream);
void *furlong_torch_alloc_cuda_graph(ssize_t bytes, int device, void *stream);
void *furlong_torch_alloc_optimizer(ssize_t bytes, int device, void *stream);
void furlong_torch_free(void *p, ssize_t bytes, int device, void *stream);

/* Of every device's arena in this process, with or without a seat: 0, or -1 and
 * furlong_torch_error(). */
int furlong_torch_keep(uint32_t tags, enum furlong_keep how, const char *folder);
int furlong_torch_offload(uint32_t tags, struct furlong_moved *out);
int furlong_torch_onload(uint32_t tags, struct furlong_moved *out);
const char *furlong_torch_error(void); /* of this thread's last failure; "" at first */
