//! How much the guest can take, from what it says of its buffer.

/// The guest's receive buffer of one connection. All counters run freely and wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Credit {
    sent: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl Credit {
    /// Takes over what a packet from the guest says.
    pub(super) fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        self.buf_alloc = buf_alloc;
        self.fwd_cnt = fwd_cnt;
    }

    /// Bytes that may be sent. A guest that claims to have taken more than was sent gets nothing.
    pub(super) fn available(&self) -> u32 {
        self.buf_alloc.saturating_sub(self.sent.wrapping_sub(self.fwd_cnt))
    }

    /// Bytes were sent.
    pub(super) fn spend(&mut self, bytes: u32) {
        self.sent = self.sent.wrapping_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn never_more_is_under_way_than_the_guest_has_room_for(
            start: u32, room in 0u32..200_000, steps in prop::collection::vec((any::<bool>(), 0u32..100_000), 0..50)
        ) {
            let mut credit = Credit { sent: start, buf_alloc: room, fwd_cnt: start };
            let mut queued = 0u32;
            let mut taken = start;
            for (send, amount) in steps {
                if send {
                    let bytes = amount.min(credit.available());
                    credit.spend(bytes);
                    queued += bytes;
                } else {
                    let bytes = amount.min(queued);
                    queued -= bytes;
                    taken = taken.wrapping_add(bytes);
                    credit.update(room, taken);
                }
                prop_assert!(queued <= room);
                prop_assert_eq!(credit.available() + queued, room.max(queued));
            }
        }

        #[test]
        fn nonsense_gives_no_more_than_the_buffer(sent: u32, buf_alloc: u32, fwd_cnt: u32) {
            let credit = Credit { sent, buf_alloc, fwd_cnt };
            prop_assert!(credit.available() <= buf_alloc);
        }
    }
}
