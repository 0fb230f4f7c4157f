//! Sizes on the command line.

use checkpoint::disk::{BLOCK_SIZE, MAX_BYTES};
use checkpoint::rootfs::MIN_WRITABLE_BYTES;

/// A disk size: bytes, or with the suffix K, M, G or T (powers of 1024).
///
/// # Errors
/// A text for the user.
pub fn parse(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.chars().last().map(|c| c.to_ascii_uppercase()) {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        Some('T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is not a number with an optional K, M, G or T"))?;
    let bytes = number.saturating_mul(1 << shift);
    if (MIN_WRITABLE_BYTES..=MAX_BYTES).contains(&bytes) && bytes.is_multiple_of(BLOCK_SIZE) {
        Ok(bytes)
    } else {
        Err(format!(
            "multiples of {BLOCK_SIZE} from {MIN_WRITABLE_BYTES} to {MAX_BYTES} bytes are possible"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_bounded() {
        assert_eq!(parse("10G"), Ok(10 << 30));
        assert_eq!(parse("64m"), Ok(64 << 20));
        assert_eq!(parse("67108864"), Ok(64 << 20));
        for bad in ["", "G", "-1G", "1", "67108865", "2T", "99999999999T", "1 G", "é"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
