/* The device code of kernels/, as one fatbin that the driver picks from. */
        .section .rodata
        .balign 64
        .globl  kernels_image
        .hidden kernels_image
        .type   kernels_image, %object
kernels_image:
        .incbin FURLONG_FATBIN
        .size   kernels_image, . - kernels_image
        .globl  kernels_image_bytes
        .hidden kernels_image_bytes
        .balign 8
kernels_image_bytes:
        .quad   kernels_image_bytes - kernels_image
        .section .note.GNU-stack, "", %progbits
