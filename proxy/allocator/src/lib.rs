//! Returns unused memory of the heap to the kernel: after a burst, glibc keeps the free memory
//! between blocks in use, and large buffers too once its threshold for them has grown. The only
//! crate with unsafe code, because the allocator has only a C interface.

/// Returns all free pages of the heap to the kernel. Briefly locks the heap of each thread.
pub fn release_unused() {
    #[cfg(target_env = "gnu")]
    glibc::malloc_trim(0);
}

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
mod glibc {
    use std::ffi::c_int;

    // malloc_trim(3): any thread may call it at any time, with any value.
    unsafe extern "C" {
        pub safe fn malloc_trim(pad: usize) -> c_int;
    }
}
