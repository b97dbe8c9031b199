//! A hash for indexes: what has the same one is compared.

/// FNV-1a, with its best bits at the upper end.
pub(super) fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let add = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, add);
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
