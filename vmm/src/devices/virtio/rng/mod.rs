//! virtio-rng: random bytes of the host.

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::model::{Context, Model, Poller};
use super::queue::Chain;
use super::sys::getrandom;

const QUEUES: &[u16] = &[64];
/// Most bytes for one request.
const REQUEST_MAX: u64 = 64 * 1024;

/// An entropy device.
#[derive(Debug)]
pub(super) struct Rng;

fn serve(mut chain: Chain<'_>) -> u64 {
    let mut left = chain.writable.len().min(REQUEST_MAX);
    let mut written = 0;
    let mut buffer = [0u8; 4096];
    while left > 0 {
        let bytes = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if let Err(error) = getrandom(&mut buffer[..bytes]) {
            tracing::warn!(%error, "random bytes");
            break;
        }
        written += chain.writable.write(&buffer[..bytes]) as u64;
        left -= bytes as u64;
    }
    written
}

impl Model for Rng {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, _context: &mut Context<'_>) {}

    fn reset(&mut self, _poller: &Poller) {}

    fn queue_event(&mut self, context: &mut Context<'_>, _queue: usize) {
        let Some(queue) = context.queues.first_mut() else {
            return;
        };
        loop {
            while let Some(chain) = queue.pop(context.mem) {
                let head = chain.head;
                let written = serve(chain);
                queue.complete(context.mem, head, written);
            }
            queue.signal(context.mem, context.interrupt);
            if !queue.enable_notification(context.mem) {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Driver, memory};
    use super::super::{DeviceSet, event_channel};

    #[test]
    fn gives_random_bytes_up_to_the_cap() {
        let mem = memory();
        let (sender, _) = event_channel().unwrap();
        let set = DeviceSet::create(mem.clone(), Vec::new(), Vec::new(), true, sender).unwrap();
        set.start();
        let mut driver = Driver::start(&set, &mem, 1);
        driver.add(&set, 0, &[], &[32]);
        driver.add(&set, 0, &[], &[32]);
        let (first, second) = (driver.wait(0).1, driver.wait(0).1);
        assert_eq!((first.len(), second.len()), (32, 32));
        assert_ne!(first, second);
        driver.add(&set, 0, &[], &[80 * 1024]);
        assert_eq!(driver.wait(0).1.len(), 64 * 1024);
        driver.add(&set, 0, &[b"nothing to write to"], &[]);
        assert_eq!(driver.wait(0).1.len(), 0);
    }
}
